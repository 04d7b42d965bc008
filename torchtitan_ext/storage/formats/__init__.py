"""Files of other people: which format lies at a path, safetensors, archives of ``torch.save``."""
