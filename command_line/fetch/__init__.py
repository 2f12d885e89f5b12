"""`outrider fetch`: brings a model's weights to a folder, whole or not at all.

choice      which files of a model serving needs. Pure
sources     what a source of files is
hub         a repository of the Hugging Face Hub
bucket      a prefix of a bucket of S3 or Google Cloud Storage
local       a folder of this machine
transfer    one file: resumed, retried, verified
record      what a fetched folder says about itself
place       the folder, the one beside it that is filled first, and the lock of both
fetching    the whole: from a source to a place
"""
