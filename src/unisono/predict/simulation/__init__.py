"""Training by more workers than there are: step times, speed-up and what limits it, from measured costs."""
