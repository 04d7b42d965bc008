"""Directories of safetensors files, as Hugging Face's libraries read them, written by the ranks of a job."""
