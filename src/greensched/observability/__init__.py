"""What an operator sees of a pool: snapshots, the socket of `greensched top`, and traces."""
