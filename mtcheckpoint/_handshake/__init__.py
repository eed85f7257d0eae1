"""The client's side of the replicator's protocol: names, states, and the driver at the disk."""
