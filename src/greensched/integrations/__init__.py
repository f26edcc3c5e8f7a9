"""greensched in other people's programs: each module is thin, and over the public names alone.

Nothing of greensched imports them, and importing greensched loads none of them.
"""
