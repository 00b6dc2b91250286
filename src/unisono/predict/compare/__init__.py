"""`unisono compare`: one script under several methods, and what each of them costs and reaches."""
