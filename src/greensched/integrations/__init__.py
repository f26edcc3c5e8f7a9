"""Integrations with other libraries: thin modules that use only the public names of greensched.

Importing greensched imports none of these modules.
"""
