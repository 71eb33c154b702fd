"""The readers of formats that are one file or one folder, and the writer of Hugging Face folders."""
