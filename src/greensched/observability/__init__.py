"""What an operator sees of a pool: snapshots, and the socket of `greensched top`."""
