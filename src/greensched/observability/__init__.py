"""What an operator can see of a pool: snapshots, the socket of `greensched top`, and traces."""
