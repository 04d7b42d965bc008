"""Safetensors files, as Hugging Face's libraries have them, written and read by the ranks of a job in any layout."""
