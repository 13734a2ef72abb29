"""Generation engines: the interface in `base`, one engine for each way to generate tokens."""
