"""What differs between event loops: waking tasks, timers and turns, one module each."""
