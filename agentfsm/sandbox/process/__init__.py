"""Code that runs in the processes of a sandbox: the supervisor outside of it, and the function inside.

It imports the standard library only, since each call starts these processes anew.
"""
