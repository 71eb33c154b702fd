"""The command line: thin verbs over the rooms below."""
