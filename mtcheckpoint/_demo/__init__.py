"""``mtcheckpoint demo``: a training job that loses machines and comes back.

text.py       what it trains on
model.py      what it trains
ledger.py     what was saved, written down beside the checkpoints
worker.py     what each of its processes runs
interrupts.py Ctrl-C, without leaving anything behind
job.py        the job as its owner sees it: started, watched, struck, ended
stage.py      a job in front of an audience
scenarios.py  the losses, and what came back
view.py       what is shown, as plain values
screen.py     a live view in a terminal, a few lines elsewhere
summary.py    the tables at the end, and the JSON file
show.py       the whole show, from start to clean-up
"""
