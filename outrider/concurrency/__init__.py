"""Concurrency helpers: tasks (`background`), thread time slices (`time_slices`), waiting times of slots
(`turnover`), queues that owners share in turns (`round_robin`)."""
