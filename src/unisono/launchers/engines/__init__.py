"""The engines that can start workers on many hosts, one file each."""
