/* Generalized advantage estimation in one pass over env-major rows, for learner/single_pass.py.

   What it computes, and what the rules are, is said in learner/gae.py, whose numpy code is the reference: the same
   operations on doubles in the same order, so the results are the same bits (which is why -ffp-contract=off is asked
   for). It only notices that something is wrong; the reference then looks for the row and names it.

   One env's recursion is a chain: every step waits for the one before it. So GROUP envs go back through time together,
   CHUNK columns at a time, in three turns over the chunk:

       prepare   per env, forwards, in vectors: increment = r * scale + gamma * next - v, as if every row were in the
                 middle of an episode; then one by one the special rows that are not (ends, fillers, K-1), whose decay
                 may be 0
       recur     all envs of the group, backwards, several to a vector: a = increment + decay * a
       deliver   per env, forwards, in vectors: advantages = a, returns = a + v, as floats

   Axis letters: N envs, T columns, K valid steps of an env. Nothing from row K on is read or written.
   Limited API of CPython 3.11; no numpy headers. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum {
    GROUP = 16,  /* chains in flight: enough to hide the latency of a multiplication and an addition */
    CHUNK = 512, /* columns: long runs of memory, and a scratch that stays in the second-level cache */
    LANES = 4,   /* chains in one vector */
    PAD = 8,     /* keeps equal columns of the group's scratch rows in different cache sets */
    WORD = 8     /* flags looked at together */
};

/* The inner loops are compiled for wider vectors too; the right one is chosen when the module is loaded. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#if __GNUC__ >= 12
#define SHUFFLES
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif
#endif
#ifndef FOR_EACH_PROCESSOR
#define FOR_EACH_PROCESSOR
#endif
#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif

#ifdef SHUFFLES
typedef double Lanes __attribute__((vector_size(LANES * sizeof(double))));
typedef int64_t Places __attribute__((vector_size(LANES * sizeof(int64_t))));

/* Rows become columns. */
INLINE void transpose(Lanes *tile)
{
    const Places even = {0, 4, 2, 6}, uneven = {1, 5, 3, 7}, low = {0, 1, 4, 5}, high = {2, 3, 6, 7};
    Lanes a = __builtin_shuffle(tile[0], tile[1], even), b = __builtin_shuffle(tile[0], tile[1], uneven);
    Lanes c = __builtin_shuffle(tile[2], tile[3], even), d = __builtin_shuffle(tile[2], tile[3], uneven);
    tile[0] = __builtin_shuffle(a, c, low);
    tile[1] = __builtin_shuffle(b, d, low);
    tile[2] = __builtin_shuffle(a, c, high);
    tile[3] = __builtin_shuffle(b, d, high);
}
#endif

typedef struct {
    double gamma, decay, reward_scale;
    bool truncation_terminates; /* a time limit counts as a real end */
    bool truncation_bootstraps; /* at a time limit the truncation value follows, and the chain is cut */
    bool last_value_always;     /* on row K-1 the last value follows even a terminated row */
} Rule;

/* One env. */
typedef struct {
    const uint8_t *terminated, *truncated, *valid;
    const float *rewards, *values, *log_probs, *truncation_values;
    float *advantages, *returns;
    double last_value;
    Py_ssize_t steps; /* K */
} Env;

INLINE uint64_t word(const uint8_t *flags)
{
    uint64_t eight;
    memcpy(&eight, flags, sizeof eight);
    return eight;
}

/* Any row t < K, whatever its flags. */
INLINE void prepare_row(const Env *env, Py_ssize_t t, const Rule *rule, double *increment, double *decay)
{
    *increment = *decay = 0.0;
    if (!env->valid[t])
        return;
    bool truncated = env->truncated[t];
    bool terminated = env->terminated[t] || (truncated && rule->truncation_terminates);
    bool bootstrapped = truncated && !terminated && rule->truncation_bootstraps;
    bool last = t == env->steps - 1;
    double next;
    if (bootstrapped)
        next = env->truncation_values[t];
    else if (terminated && !(last && rule->last_value_always))
        next = 0.0;
    else
        next = last ? env->last_value : env->values[t + 1];
    *increment = (double)env->rewards[t] * rule->reward_scale + rule->gamma * next - (double)env->values[t];
    if (!terminated && !bootstrapped)
        *decay = rule->decay;
}

/* What a group works on. Between chunks every decay is gamma * lambda. */
typedef struct {
    double increments[GROUP][CHUNK + PAD], decays[CHUNK][GROUP];
    uint16_t special[GROUP][CHUNK]; /* per env, the columns that are not plain rows in the middle of an episode */
    int num_special[GROUP];
} Scratch;

/* An exponent of all ones is an infinity or a NaN. */
INLINE bool odd_float(const float *number)
{
    uint32_t bits;
    memcpy(&bits, number, sizeof bits);
    return (bits & UINT32_C(0x7f800000)) == UINT32_C(0x7f800000);
}

INLINE bool odd_double(const double *number)
{
    uint64_t bits;
    memcpy(&bits, number, sizeof bits);
    return (bits & UINT64_C(0x7ff0000000000000)) == UINT64_C(0x7ff0000000000000);
}

/* Rows begin .. begin + count - 1 of env e of the group, all of them < K. False if a log-prob is not finite; that of a
   filler counts too, the reference knows better. */
INLINE bool prepare(const Env *env, Py_ssize_t begin, int count, const Rule *rule, Scratch *scratch, int e)
{
    double *restrict increments = scratch->increments[e];
    uint16_t *restrict special = scratch->special[e];
    const uint8_t *terminated = env->terminated + begin, *truncated = env->truncated + begin;
    const uint8_t *valid = env->valid + begin;
    const float *restrict rewards = env->rewards + begin, *restrict values = env->values + begin;
    const float *restrict log_probs = env->log_probs + begin;
    const double gamma = rule->gamma, scale = rule->reward_scale;
    /* Whole words of rows that have a row after them. */
    Py_ssize_t after = env->steps - 1 - begin;
    int bulk = (int)(count < after ? count : after) / WORD * WORD, num_special = 0;
    uint8_t flagged[CHUNK];

    for (int t = 0; t < bulk; t++)
        flagged[t] = terminated[t] | truncated[t] | (valid[t] ^ 1);
    for (int t = 0; t < bulk; t += WORD)
        if (word(flagged + t))
            for (int u = t; u < t + WORD; u++) {
                special[num_special] = (uint16_t)u;
                num_special += flagged[u] != 0;
            }
    for (int t = bulk; t < count; t++)
        special[num_special++] = (uint16_t)t;
    scratch->num_special[e] = num_special;

    uint32_t odd = 0;
    for (int t = 0; t < bulk; t++) {
        odd |= odd_float(log_probs + t);
        increments[t] = (double)rewards[t] * scale + gamma * (double)values[t + 1] - (double)values[t];
    }
    for (int t = bulk; t < count; t++)
        odd |= odd_float(log_probs + t);
    for (int i = 0; i < num_special; i++)
        prepare_row(env, begin + special[i], rule, increments + special[i], &scratch->decays[special[i]][e]);
    return !odd;
}

/* All chains of the group, from the last column to the first; increments become links. */
INLINE void recur(Scratch *scratch, int columns, double *chain)
{
    int t = columns;
#ifdef SHUFFLES
    int rest = columns % LANES;
#else
    int rest = columns;
#endif
    for (; rest > 0; rest--) {
        t--;
        for (int e = 0; e < GROUP; e++)
            scratch->increments[e][t] = chain[e] = scratch->increments[e][t] + scratch->decays[t][e] * chain[e];
    }
#ifdef SHUFFLES
    Lanes links[GROUP / LANES];
    memcpy(links, chain, sizeof links);
    while (t > 0) {
        t -= LANES;
        for (int g = 0; g < GROUP / LANES; g++) {
            Lanes tile[LANES], decay;
            for (int e = 0; e < LANES; e++)
                memcpy(&tile[e], &scratch->increments[g * LANES + e][t], sizeof tile[e]);
            transpose(tile);
            for (int c = LANES - 1; c >= 0; c--) {
                memcpy(&decay, &scratch->decays[t + c][g * LANES], sizeof decay);
                tile[c] = links[g] = tile[c] + decay * links[g];
            }
            transpose(tile);
            for (int e = 0; e < LANES; e++)
                memcpy(&scratch->increments[g * LANES + e][t], &tile[e], sizeof tile[e]);
        }
    }
    memcpy(chain, links, sizeof links);
#endif
}

/* The rows that were prepared. False if one of them is not finite: its increment was not, so its link is not. */
INLINE bool deliver(const Env *env, Py_ssize_t begin, int count, const Rule *rule, Scratch *scratch, int e)
{
    float *restrict advantages = env->advantages + begin, *restrict returns = env->returns + begin;
    const float *restrict values = env->values + begin;
    const double *restrict chain = scratch->increments[e];
    uint64_t odd = 0;
    for (int t = 0; t < count; t++) {
        odd |= odd_double(chain + t);
        advantages[t] = (float)chain[t];
        returns[t] = (float)(chain[t] + (double)values[t]);
    }
    for (int i = 0; i < scratch->num_special[e]; i++) {
        int t = scratch->special[e][i];
        if (!env->valid[begin + t])
            returns[t] = 0.0f;
        scratch->decays[t][e] = rule->decay;
    }
    return !odd;
}

/* A group of envs over all columns. */
FOR_EACH_PROCESSOR static bool estimate(const Env *envs, int num_envs, const Rule *rule, Scratch *scratch)
{
    double chain[GROUP] = {0.0};
    Py_ssize_t longest = 0;
    for (int e = 0; e < num_envs; e++)
        if (envs[e].steps > longest)
            longest = envs[e].steps;
    bool sound = true;
    for (Py_ssize_t begin = (longest - 1) / CHUNK * CHUNK; longest > 0 && begin >= 0; begin -= CHUNK) {
        int columns = (int)(longest - begin < CHUNK ? longest - begin : CHUNK), counts[GROUP];
        for (int e = 0; e < GROUP; e++) {
            Py_ssize_t left = e < num_envs ? envs[e].steps - begin : 0;
            counts[e] = left < 0 ? 0 : left < columns ? (int)left : columns;
            if (counts[e] > 0)
                sound &= prepare(envs + e, begin, counts[e], rule, scratch, e);
            for (int t = counts[e]; t < columns; t++)
                scratch->increments[e][t] = 0.0;
        }
        recur(scratch, columns, chain);
        for (int e = 0; e < GROUP; e++)
            if (counts[e] > 0)
                sound &= deliver(envs + e, begin, counts[e], rule, scratch, e);
    }
    return sound;
}

/* The arguments that are arrays. */
enum {
    TERMINATED, TRUNCATED, VALID, REWARDS, VALUES, LOG_PROBS, TRUNCATION_VALUES, /* read, [N, T] */
    ADVANTAGES, RETURNS,                                                        /* written, [N, T] */
    LAST_VALUES, VALID_STEPS,                                                   /* read, [N] */
    ARRAYS
};
/* Item types by the letters of the buffer protocol. */
static const char *const LETTERS[ARRAYS] = {"B?", "B?", "B?", "f", "f", "f", "f", "f", "f", "d", "lq"};
static const Py_ssize_t SIZES[ARRAYS] = {1, 1, 1, 4, 4, 4, 4, 4, 4, 8, 8};

/* An env's row, or its number. */
static void *row(const Py_buffer *view, Py_ssize_t env) { return (char *)view->buf + env * view->strides[0]; }

static bool readable(const Py_buffer *view, int which, Py_ssize_t num_envs, Py_ssize_t columns)
{
    const char *letter = view->format;
    if (letter == NULL || letter[0] == '\0' || letter[1] != '\0' || strchr(LETTERS[which], letter[0]) == NULL)
        return false;
    if (view->itemsize != SIZES[which] || view->ndim < 1 || view->shape[0] != num_envs)
        return false;
    if (which >= LAST_VALUES)
        return view->ndim == 1;
    return view->ndim == 2 && view->shape[1] == columns && (view->strides[1] == SIZES[which] || columns < 2);
}

static bool every_group(const Py_buffer *views, Py_ssize_t num_envs, Py_ssize_t columns, const Rule *rule)
{
    bool sound = true;
    Scratch scratch;
    for (int e = 0; e < GROUP; e++)
        for (int t = 0; t < CHUNK && t < columns; t++)
            scratch.decays[t][e] = rule->decay;
    for (Py_ssize_t first = 0; first < num_envs; first += GROUP) {
        Env envs[GROUP];
        int count = (int)(num_envs - first < GROUP ? num_envs - first : GROUP);
        for (int e = 0; e < count; e++) {
            void *of[ARRAYS];
            for (int which = 0; which < ARRAYS; which++)
                of[which] = row(&views[which], first + e);
            envs[e] = (Env){.terminated = of[TERMINATED], .truncated = of[TRUNCATED], .valid = of[VALID],
                            .rewards = of[REWARDS], .values = of[VALUES], .log_probs = of[LOG_PROBS],
                            .truncation_values = of[TRUNCATION_VALUES], .advantages = of[ADVANTAGES],
                            .returns = of[RETURNS], .last_value = *(const double *)of[LAST_VALUES],
                            .steps = (Py_ssize_t) * (const int64_t *)of[VALID_STEPS]};
        }
        sound &= estimate(envs, count, rule, &scratch);
    }
    return sound;
}

PyDoc_STRVAR(ESTIMATE, "Advantages and returns of rows [N, T]; False if the reference has to look at them.");

static PyObject *py_estimate(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *arrays[ARRAYS];
    double gamma, decay, reward_scale;
    int terminates, bootstraps, always;
    if (!PyArg_ParseTuple(arguments, "OOOOOOOOOOOdddppp:estimate", &arrays[TERMINATED], &arrays[TRUNCATED],
                          &arrays[VALID], &arrays[REWARDS], &arrays[VALUES], &arrays[LOG_PROBS],
                          &arrays[TRUNCATION_VALUES], &arrays[ADVANTAGES], &arrays[RETURNS], &arrays[LAST_VALUES],
                          &arrays[VALID_STEPS], &gamma, &decay, &reward_scale, &terminates, &bootstraps, &always))
        return NULL;
    const Rule rule = {gamma, decay, reward_scale, terminates, bootstraps, always};
    Py_buffer views[ARRAYS];
    int held = 0;
    PyObject *answer = NULL;
    for (; held < ARRAYS; held++) {
        int wanted = PyBUF_STRIDES | PyBUF_FORMAT | (held == ADVANTAGES || held == RETURNS ? PyBUF_WRITABLE : 0);
        if (PyObject_GetBuffer(arrays[held], &views[held], wanted) < 0)
            goto release;
    }
    bool fit = views[REWARDS].ndim == 2; /* and, once the work is over: every row is sound */
    Py_ssize_t num_envs = fit ? views[REWARDS].shape[0] : 0, columns = fit ? views[REWARDS].shape[1] : 0;
    for (int which = 0; fit && which < ARRAYS; which++)
        fit = readable(&views[which], which, num_envs, columns);
    for (Py_ssize_t env = 0; fit && env < num_envs; env++) {
        int64_t steps = *(const int64_t *)row(&views[VALID_STEPS], env);
        fit = 0 <= steps && steps <= columns;
    }
    if (fit) {
        Py_BEGIN_ALLOW_THREADS
        fit = every_group(views, num_envs, columns, &rule);
        Py_END_ALLOW_THREADS
    }
    answer = PyBool_FromLong(fit);
release:
    while (held > 0)
        PyBuffer_Release(&views[--held]);
    return answer;
}

static PyMethodDef functions[] = {{"estimate", py_estimate, METH_VARARGS, ESTIMATE}, {NULL, NULL, 0, NULL}};
static PyModuleDef_Slot slots[] = {{0, NULL}};
static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT, .m_name = "_single_pass", .m_methods = functions, .m_slots = slots};

PyMODINIT_FUNC PyInit__single_pass(void) { return PyModuleDef_Init(&definition); }
