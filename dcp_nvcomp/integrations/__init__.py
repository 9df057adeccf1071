"""This package in other software: frameworks, and what watches a job."""
