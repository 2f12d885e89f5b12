"""Batches: files of requests that run in spare capacity, whichever replica has some.

`batch` is the pure core: states and their order. `validation` checks a file of requests. `batch_lines` reads its lines
and writes the lines of results. `line_journal` keeps batches and the leases on their lines in Redis, with the scripts
of `journal_scripts`. `files` keeps clients' files, whose content lies in a `file_store`: a folder, or S3.
`batch_desk` answers clients. `batch_runner` runs the lines in the turns of `line_room`, with `batch_tasks` at their
beginning and end. Nothing here knows HTTP.
"""
