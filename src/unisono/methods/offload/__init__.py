"""The optimizer step off the device: its state is on the host or on disk, and is stepped there block by block.

Read `blocks` (what is stepped), then `pipeline` (the step beside the computation) and `stepper` (the step itself).
"""
