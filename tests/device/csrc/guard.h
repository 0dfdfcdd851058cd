#pragma once

namespace lag {

// Make the device known to torch: allocators and hooks. Holds for the rest of the process.
void register_with_torch();

}  // namespace lag
