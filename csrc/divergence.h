// The divergences between a target's distribution p and a drafter's q that draft_loss can train on.
#pragma once

namespace dflash::loss {

enum class Divergence { kNone, kForward, kReverse, kJs, kTv };

}  // namespace dflash::loss
