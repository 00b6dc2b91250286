"""The exchange of gradients: windows of backward passes, buckets exchanged while backward goes on, reducers at work."""
