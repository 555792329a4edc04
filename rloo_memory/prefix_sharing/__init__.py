"""Prefix sharing: each prompt goes through a model once for all its completions. It imports nothing of TRL."""
