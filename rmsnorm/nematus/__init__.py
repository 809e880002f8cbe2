"""What is the same in every wing's port of Nematus: checked batches of sentences, and the two beam searches."""
