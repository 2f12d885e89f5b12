"""Concurrency helpers: tasks (`background`), thread time slices (`time_slices`), waiting times of slots
(`turnover`)."""
