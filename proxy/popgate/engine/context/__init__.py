"""Contains the objects that all parts of the engine share: ports, options, memory budget, and router to other
proxies."""
