"""The simulated driver: its rules, its time, its faults."""
