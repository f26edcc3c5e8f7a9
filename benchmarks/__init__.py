"""What greensched costs, measured beside what one would write without it: `make bench`."""
