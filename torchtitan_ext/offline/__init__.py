"""Work on checkpoints without a job: what a save or load on some mesh would do; comparing, resharding, converting."""
