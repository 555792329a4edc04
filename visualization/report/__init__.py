"""The page of a results folder."""
