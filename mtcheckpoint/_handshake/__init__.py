"""The client side of the replicator's protocol: names, states, and the driver that meets the disk."""
