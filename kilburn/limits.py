"""Every limit that more than one process relies on, with its reason. Limits of one module stay in that module."""

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

# ---------------------------------------------------------------------------------------------------------- wire

#: Of all three processes; a peer of another one is refused at its hello.
PROTOCOL: Final = 3

#: One ZeroMQ frame. The longest that we send is a Submit: a prompt of a million ids in packed varints is under 4 MiB,
#: and the gateway takes no gRPC message that long.
MAX_FRAME_BYTES: Final = 16 * MIB

#: Frames waiting in one socket, each way. A peer that is this far behind is dead in all but name: 4,096 steps.
MAX_QUEUED_FRAMES: Final = 4096

#: Bytes of a Unix socket's path (sun_path, less its final NUL).
MAX_SOCKET_PATH_BYTES: Final = 107

#: Each side speaks at least this often.
HEARTBEAT_INTERVAL_SECONDS: Final = 0.5

#: A peer that was silent for this long is dead. Four heartbeats; with the restart's own delays the client has its
#: UNAVAILABLE well within five seconds.
PEER_TIMEOUT_SECONDS: Final = 2.5

#: An executor whose (step, layer) stands still for this long while a plan is out is frozen.
EXECUTOR_STALL_SECONDS: Final = 5.0

#: Hellos are repeated until a Welcome comes.
HELLO_INTERVAL_SECONDS: Final = 0.25

# ------------------------------------------------------------------------------------------------------ requests

#: Events that memmgr holds for those who read them: minutes of a busy server, some 60 MB where a block has 16 tokens.
MAX_EVENTS_HELD: Final = 2**18

#: Events that ExplainBlock tells of one block.
MAX_EVENTS_EXPLAINED: Final = 256

#: Pins at once. A pool counts them in 16 bits for each block.
MAX_PINS: Final = 1024

#: Tenants with a quota. A step looks at one waiting request for each at the most.
MAX_QUOTAS: Final = 256

#: Calls that watch events at once. Each looks for news twenty times a second.
MAX_WATCHERS: Final = 64

#: A gRPC message, either way: what gRPC clients accept by default.
MAX_GRPC_MESSAGE_BYTES: Final = 4 * MIB

#: Of a request's id, tenant or salt, in characters.
MAX_NAME_CHARACTERS: Final = 128

#: Alternatives beside the sampled token (`Output.logprobs`).
MAX_TOP_LOGPROBS: Final = 20

#: Sequences of one request (`n`).
MAX_SAMPLES: Final = 64

#: Beams of one request (`beam_width`).
MAX_BEAM_WIDTH: Final = 16

#: Of beams, either way: a length of 2^20 to its power is still a number.
MAX_LENGTH_PENALTY: Final = 16.0

#: Stop token ids of one request, the model's own ends of sequence among them.
MAX_STOP_TOKEN_IDS: Final = 128

#: Tokens with a bias in one request: as many as vLLM takes. Some 12 KB in each plan that opens a slot for it.
MAX_LOGIT_BIASES: Final = 1024

#: Prompt tokens that one step tells of. Each needs a row of logits, of which a step otherwise has one for each sequence: so many
#: take 25 MB with the default model's vocabulary, and 134 MB with the largest ones there are.
MAX_PROMPT_ROWS: Final = 128

#: Continuations told of one beam: as many that do not end it as there are beams, behind all that do.
MAX_CHOICES: Final = MAX_BEAM_WIDTH + MAX_STOP_TOKEN_IDS

#: Tokens in a block.
MAX_BLOCK_SIZE: Final = 1024
