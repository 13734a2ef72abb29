"""Nouns, wire protocol and shared arithmetic. Imports no role and none of torch, vllm, ray, deepspeed."""
