"""Where the processes of several machines run: engines, samplers and batch workers as actors of a Ray cluster.

Ray starts them, places them, and starts them again; it carries nothing else. What they work on, and what they have
done, is in the database and the storage, where they meet as on one machine. `scaling` and `depths` say how many there
should be, `controller` makes it so, `shell` keeps one process, and `cluster` alone speaks to Ray.
"""
