"""The lab: workers on emulated hosts of one machine, with networks as slow as asked for."""
