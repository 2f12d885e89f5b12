"""`outrider bench`: how fast does a server answer under load, whichever server it is?"""
