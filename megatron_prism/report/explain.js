// The page of memory alone.

cards(memoryCards());
tabs([["memory", "Memory", memory], provenance(...DATA.provenance),
  reading("allocated, reserved, device", "categories of memory", "class")]);
