"""The learner: trees in, updates and weights out. Imports no other role and no environment."""
