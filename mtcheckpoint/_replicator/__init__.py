"""The replicator's side of multi-tier checkpointing, for nodes on one machine.

settings.py    what a replicator.yaml asks for (pure)
choice.py      which step, which peers, what to keep (pure)
hashing.py     the name of a share
volume.py      one node's directory
backup.py      the bucket
rendezvous.py  how nodes of a run meet and agree
session.py     what the phases of a run share
restoring.py   choose, fetch, answer
saving.py      take, copy, agree, clean up
uploading.py   back up in the background
node.py        one run after the other
embedded.py    all nodes in one process
main.py        the command
"""
