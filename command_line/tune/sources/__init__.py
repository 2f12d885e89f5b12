"""`outrider tune` with several sources of hints: measures each on the same sequences and recommends one.

offers        which sources the folders offer
mask_path     a block as a draft with mask tokens drafts it
drafting      really drafts blocks from every position of the target's sequences
lookup        replays lookup over them
measuring     runs the models and heads, one after the other
forecasts     predicted speed-ups by source
comparison    what was found, and the best source
commands      commands that start it
report        tables and words for people
document      JSON
compare       the whole comparison
"""
