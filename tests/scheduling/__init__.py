"""The head: plain synchronous tests, and a state machine against a naive model."""
