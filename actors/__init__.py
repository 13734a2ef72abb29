"""The actors: they grow trees by running leases, and pull the weights they sample from."""
