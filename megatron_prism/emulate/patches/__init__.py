"""What an emulated job changes in Megatron, by subject."""
