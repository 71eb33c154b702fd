"""The parts of which every order is made. One file per concern, as in the engine's handlers.

Each function appends the operations that belong together, with the data they wait for and the buffers they hold.
"""
