"""`unisono report`: what a recorded run was, where its time went, and what to make of it. No torch."""
