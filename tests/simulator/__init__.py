"""`make simulate`: several engines in one thread and in virtual time, under a nemesis; a seed determines the whole
run.
"""
