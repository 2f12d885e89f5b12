"""`outrider fetch`: brings a model's weights to a folder, whole or not at all.

choice      which files of a model serving needs. Pure
sources     the interface of a source of files
hub         a repository of the Hugging Face Hub
bucket      a prefix of a bucket of S3 or Google Cloud Storage
local       a folder of this machine
transfer    one file: resumed, retried, verified
record      the record inside a fetched folder
place       the folder, the one beside it that is filled first, and the lock of both
display     a bar on a terminal, lines in a log
fetching    the whole: from a source to a place
"""
