"""The scheduler: plain synchronous tests, and state machines against naive models."""
