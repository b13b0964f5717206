"""Operations on plain tensors and numbers. Imports nothing from the other folders."""
