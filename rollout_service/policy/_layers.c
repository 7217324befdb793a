/* Layers of the policy over whole rollouts, compiled: arrays in, arrays out, the interpreter given up meanwhile. kernels.py
   calls them; the headers say what is computed, and in which arrays. For x86 processors with AVX-512; elsewhere `supported`
   says no, and where they could not even be compiled there is nothing else.

   What must never happen: an array that is smaller than what is read or written of it.

   Axis letters: T steps, n rows, M rows of any kind, D inputs, H hidden, or outputs. Limited API of CPython 3.11. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <stdlib.h>

#include "_tiles.h"

#include "_dense_layer.h"
#include "_heads.h"
#include "_lstm_layer.h"

/* Arrays whose sizes are known, held while the interpreter is given up, and memory to work in. */
enum { ARRAYS = 15, PARTS = 5 };
typedef struct {
    Py_buffer views[ARRAYS];
    float *of[ARRAYS];
    int held;
    float *scratch[PARTS]; /* the first one is freed */
} Held;

/* floats: how many each array must have, 0 if it may be None; those from `written` on are written. False and an error
   if one does not fit. */
static bool hold(Held *held, PyObject *arrays, const Py_ssize_t *floats, int count, int written)
{
    held->held = 0;
    held->scratch[0] = NULL;
    if (PyTuple_Size(arrays) != count) {
        PyErr_Format(PyExc_ValueError, "%zd arrays were given, %d are needed", PyTuple_Size(arrays), count);
        return false;
    }
    for (int i = 0; i < count; i++) {
        Py_buffer *view = &held->views[i];
        if (PyObject_GetBuffer(PyTuple_GetItem(arrays, i), view, i < written ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0)
            return false;
        held->of[i] = view->buf;
        held->held++;
        if (view->len != floats[i] * (Py_ssize_t)sizeof(float)) {
            PyErr_Format(PyExc_ValueError, "array %d has %zd bytes, it must have %zd", i, view->len,
                         floats[i] * (Py_ssize_t)sizeof(float));
            return false;
        }
    }
    return true;
}

/* floats: multiples of 16, so that each part begins on a cache line. False and an error if there is no memory. */
static bool allot(Held *held, const Py_ssize_t *floats, int parts)
{
    Py_ssize_t total = 0;
    for (int part = 0; part < parts; part++)
        total += floats[part];
    float *at = held->scratch[0] = aligned_alloc(64, total * sizeof *at);
    for (int part = 0; at != NULL && part < parts; at += floats[part++])
        held->scratch[part] = at;
    if (at == NULL)
        PyErr_NoMemory();
    return at != NULL;
}

static PyObject *let_go(Held *held, bool done)
{
    free(held->scratch[0]);
    while (held->held > 0)
        PyBuffer_Release(&held->views[--held->held]);
    if (!done)
        return NULL;
    Py_RETURN_NONE;
}

static bool refuse(const char *why)
{
    PyErr_SetString(PyExc_ValueError, why);
    return false;
}

static bool sound(const Sizes *s)
{
    if (s->steps > 0 && s->rows > 0 && s->inputs > 0 && s->hidden > 0 && s->hidden % LANES == 0)
        return true;
    return refuse("sizes must be above 0, and hidden a multiple of 16");
}

PyDoc_STRVAR(LSTM_FORWARD, "Writes gates, entering[:, 1:] and out. Without keep the gates are those of one step.");

static PyObject *py_lstm_forward(PyObject *module, PyObject *arguments)
{
    (void)module;
    Sizes s;
    int keep;
    PyObject *arrays;
    if (!PyArg_ParseTuple(arguments, "nnnnpO!:lstm_forward", &s.steps, &s.rows, &s.inputs, &s.hidden, &keep,
                          &PyTuple_Type, &arrays) || !sound(&s))
        return NULL;
    enum { X, FLAGS, W_IH, W_HH, B_IH, B_HH, GATES, ENTERING, OUT, COUNT };
    enum { WEIGHTS, BIAS, SCRATCH };
    const Py_ssize_t state = s.rows * s.hidden, width = 4 * s.hidden, gate_step = keep ? 4 * state : 0;
    const Py_ssize_t floats[COUNT] = {
        [X] = s.steps * s.rows * s.inputs, [FLAGS] = s.steps * s.rows, [W_IH] = width * s.inputs,
        [W_HH] = width * s.hidden, [B_IH] = width, [B_HH] = width, [GATES] = 4 * state * (keep ? s.steps : 1),
        [ENTERING] = 2 * (s.steps + 1) * state, [OUT] = s.steps * state};
    const Py_ssize_t scratch[SCRATCH] = {[WEIGHTS] = width * (s.inputs + s.hidden), [BIAS] = width};
    Held held;
    bool fit = hold(&held, arrays, floats, COUNT, GATES) && allot(&held, scratch, SCRATCH);
    if (fit) {
        float **of = held.of, *weights = held.scratch[WEIGHTS], *bias = held.scratch[BIAS];
        Py_BEGIN_ALLOW_THREADS
        lstm_lay_out(&s, of[W_IH], of[W_HH], of[B_IH], of[B_HH], weights, bias);
        lstm_forward(&s, of[X], of[FLAGS], weights, bias, of[GATES], gate_step, of[ENTERING], of[OUT]);
        Py_END_ALLOW_THREADS
    }
    return let_go(&held, fit);
}

PyDoc_STRVAR(LSTM_BACKWARD, "Writes the slopes of x, of h and c, of both weights, and of each bias.");

static PyObject *py_lstm_backward(PyObject *module, PyObject *arguments)
{
    (void)module;
    Sizes s;
    PyObject *arrays;
    if (!PyArg_ParseTuple(arguments, "nnnnO!:lstm_backward", &s.steps, &s.rows, &s.inputs, &s.hidden, &PyTuple_Type,
                          &arrays) || !sound(&s))
        return NULL;
    enum { X, FLAGS, W_IH, W_HH, GATES, ENTERING, BY_OUT, BY_X, BY_STATE, BY_W_IH, BY_W_HH, BY_B, COUNT };
    const Py_ssize_t state = s.rows * s.hidden, width = 4 * s.hidden, panel_size = (s.inputs + s.hidden) * WIDTH;
    const Py_ssize_t floats[COUNT] = {
        [X] = s.steps * s.rows * s.inputs, [FLAGS] = s.steps * s.rows, [W_IH] = width * s.inputs,
        [W_HH] = width * s.hidden, [GATES] = 4 * state * s.steps, [ENTERING] = 2 * (s.steps + 1) * state,
        [BY_OUT] = s.steps * state, [BY_X] = s.steps * s.rows * s.inputs, [BY_STATE] = 2 * state,
        [BY_W_IH] = width * s.inputs, [BY_W_HH] = width * s.hidden, [BY_B] = width};
    Py_ssize_t scratch[LSTM_SCRATCH];
    lstm_scratch(&s, scratch);
    Held held;
    bool fit = hold(&held, arrays, floats, COUNT, BY_X) && allot(&held, scratch, LSTM_SCRATCH);
    if (fit) {
        float **of = held.of, *by_weights = held.scratch[BY_WEIGHTS];
        Py_BEGIN_ALLOW_THREADS
        lay_out_backward(gate_order(&s), of[W_IH], s.inputs, held.scratch[INPUT_WEIGHTS]);
        lay_out_backward(gate_order(&s), of[W_HH], s.hidden, held.scratch[HIDDEN_WEIGHTS]);
        lstm_backward(&s, of[X], of[FLAGS], of[GATES], of[ENTERING], of[BY_OUT], held.scratch, of[BY_X], of[BY_STATE],
                      of[BY_STATE] + state);
        take_slopes(gate_order(&s), by_weights, panel_size, s.inputs, of[BY_W_IH]);
        take_slopes(gate_order(&s), by_weights + s.inputs * WIDTH, panel_size, s.hidden, of[BY_W_HH]);
        take_slopes(gate_order(&s), held.scratch[BY_BIAS], WIDTH, 1, of[BY_B]);
        Py_END_ALLOW_THREADS
    }
    return let_go(&held, fit);
}

PyDoc_STRVAR(DENSE_FORWARD, "Writes out.");

static PyObject *py_dense_forward(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_ssize_t count, inputs, outputs;
    PyObject *arrays;
    if (!PyArg_ParseTuple(arguments, "nnnO!:dense_forward", &count, &inputs, &outputs, &PyTuple_Type, &arrays))
        return NULL;
    if (count < 0 || inputs < 1 || outputs < 1)
        return refuse("inputs and outputs must be above 0, rows not below"), NULL;
    enum { X, WEIGHT, B, OUT, COUNT };
    enum { WEIGHTS, BIAS, SCRATCH };
    const Py_ssize_t columns = panels_of(outputs) * WIDTH;
    const Py_ssize_t floats[COUNT] = {
        [X] = count * inputs, [WEIGHT] = outputs * inputs, [B] = outputs, [OUT] = count * outputs};
    const Py_ssize_t scratch[SCRATCH] = {[WEIGHTS] = columns * inputs, [BIAS] = columns};
    const Order order = {outputs, 0};
    Held held;
    bool fit = hold(&held, arrays, floats, COUNT, OUT) && allot(&held, scratch, SCRATCH);
    if (fit) {
        float **of = held.of, *weights = held.scratch[WEIGHTS], *bias = held.scratch[BIAS];
        Py_BEGIN_ALLOW_THREADS
        lay_out_forward(order, of[WEIGHT], inputs, weights, inputs * WIDTH);
        lay_out_forward(order, of[B], 1, bias, WIDTH);
        dense_forward(count, inputs, outputs, of[X], weights, bias, of[OUT]);
        Py_END_ALLOW_THREADS
    }
    return let_go(&held, fit);
}

PyDoc_STRVAR(DENSE_BACKWARD, "Writes the slopes of weight and bias, and of x if asked; an array of no size if not.");

static PyObject *py_dense_backward(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_ssize_t count, inputs, outputs;
    int asked;
    PyObject *arrays;
    if (!PyArg_ParseTuple(arguments, "nnnpO!:dense_backward", &count, &inputs, &outputs, &asked, &PyTuple_Type, &arrays))
        return NULL;
    if (count < 0 || inputs < 1 || outputs < 1)
        return refuse("inputs and outputs must be above 0, rows not below"), NULL;
    enum { X, WEIGHT, OUT, BY_OUT, BY_X, BY_WEIGHT, BY_B, COUNT };
    const Py_ssize_t floats[COUNT] = {
        [X] = count * inputs, [WEIGHT] = outputs * inputs, [OUT] = count * outputs, [BY_OUT] = count * outputs,
        [BY_X] = asked ? count * inputs : 0, [BY_WEIGHT] = outputs * inputs, [BY_B] = outputs};
    Py_ssize_t scratch[DENSE_SCRATCH];
    dense_scratch(inputs, outputs, scratch);
    const Order order = {outputs, 0};
    Held held;
    bool fit = hold(&held, arrays, floats, COUNT, BY_X) && allot(&held, scratch, DENSE_SCRATCH);
    if (fit) {
        float **of = held.of;
        Py_BEGIN_ALLOW_THREADS
        if (asked)
            lay_out_backward(order, of[WEIGHT], inputs, held.scratch[DENSE_WEIGHTS]);
        dense_backward(count, inputs, outputs, of[X], of[OUT], of[BY_OUT], held.scratch, asked ? of[BY_X] : NULL);
        take_slopes(order, held.scratch[BY_DENSE_WEIGHTS], inputs * WIDTH, inputs, of[BY_WEIGHT]);
        take_slopes(order, held.scratch[BY_DENSE_BIAS], WIDTH, 1, of[BY_B]);
        Py_END_ALLOW_THREADS
    }
    return let_go(&held, fit);
}

static bool sound_heads(const Heads *s)
{
    if (s->rows > 0 && s->choices > 0 && s->features > 0 && s->features % LANES == 0)
        return true;
    return refuse("sizes must be above 0, and features a multiple of 16");
}

/* int64 */
static Py_ssize_t wide(Py_ssize_t count) { return count * (Py_ssize_t)(sizeof(int64_t) / sizeof(float)); }

PyDoc_STRVAR(HEADS_FORWARD, "Writes log_p, values, log_probs and entropy.");

static PyObject *py_heads_forward(PyObject *module, PyObject *arguments)
{
    (void)module;
    Heads s;
    PyObject *arrays;
    if (!PyArg_ParseTuple(arguments, "nnnnO!:heads_forward", &s.rows, &s.features, &s.choices, &s.start, &PyTuple_Type,
                          &arrays) || !sound_heads(&s))
        return NULL;
    enum { FEATURES, POLICY, POLICY_BIAS, VALUE, VALUE_BIAS, ACTIONS, LOG_P, VALUES, LOG_PROBS, ENTROPY, COUNT };
    const Py_ssize_t floats[COUNT] = {
        [FEATURES] = s.rows * s.features, [POLICY] = s.choices * s.features, [POLICY_BIAS] = s.choices,
        [VALUE] = s.features, [VALUE_BIAS] = 1, [ACTIONS] = wide(s.rows), [LOG_P] = s.choices * s.rows,
        [VALUES] = s.rows, [LOG_PROBS] = s.rows, [ENTROPY] = s.rows};
    Held held;
    bool fit = hold(&held, arrays, floats, COUNT, LOG_P);
    if (fit) {
        float **of = held.of;
        Py_BEGIN_ALLOW_THREADS
        heads_forward(&s, of[FEATURES], of[POLICY], of[POLICY_BIAS], of[VALUE], of[VALUE_BIAS],
                      (const int64_t *)(const void *)of[ACTIONS], of[LOG_P], of[VALUES], of[LOG_PROBS], of[ENTROPY]);
        Py_END_ALLOW_THREADS
    }
    return let_go(&held, fit);
}

PyDoc_STRVAR(HEADS_BACKWARD, "Writes the slopes of features and of both heads' weights and biases.");

static PyObject *py_heads_backward(PyObject *module, PyObject *arguments)
{
    (void)module;
    Heads s;
    PyObject *arrays;
    if (!PyArg_ParseTuple(arguments, "nnnnO!:heads_backward", &s.rows, &s.features, &s.choices, &s.start, &PyTuple_Type,
                          &arrays) || !sound_heads(&s))
        return NULL;
    enum { FEATURES, POLICY, VALUE, ACTIONS, LOG_P, ENTROPY, BY_LOG_PROB, BY_VALUE, BY_ENTROPY,
           BY_FEATURES, BY_POLICY, BY_POLICY_BIAS, BY_VALUE_WEIGHT, BY_VALUE_BIAS, COUNT };
    const Py_ssize_t floats[COUNT] = {
        [FEATURES] = s.rows * s.features, [POLICY] = s.choices * s.features, [VALUE] = s.features,
        [ACTIONS] = wide(s.rows), [LOG_P] = s.choices * s.rows, [ENTROPY] = s.rows, [BY_LOG_PROB] = s.rows,
        [BY_VALUE] = s.rows, [BY_ENTROPY] = s.rows, [BY_FEATURES] = s.rows * s.features,
        [BY_POLICY] = s.choices * s.features, [BY_POLICY_BIAS] = s.choices, [BY_VALUE_WEIGHT] = s.features,
        [BY_VALUE_BIAS] = 1};
    Held held;
    bool fit = hold(&held, arrays, floats, COUNT, BY_FEATURES);
    if (fit) {
        float **of = held.of;
        Py_BEGIN_ALLOW_THREADS
        heads_backward(&s, of[FEATURES], of[POLICY], of[VALUE], (const int64_t *)(const void *)of[ACTIONS], of[LOG_P],
                       of[ENTROPY], of[BY_LOG_PROB], of[BY_VALUE], of[BY_ENTROPY], of[BY_FEATURES], of[BY_POLICY],
                       of[BY_POLICY_BIAS], of[BY_VALUE_WEIGHT], of[BY_VALUE_BIAS]);
        Py_END_ALLOW_THREADS
    }
    return let_go(&held, fit);
}

static int has_avx512(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f");
}
#define KERNELS \
    {"lstm_forward", py_lstm_forward, METH_VARARGS, LSTM_FORWARD}, \
    {"lstm_backward", py_lstm_backward, METH_VARARGS, LSTM_BACKWARD}, \
    {"dense_forward", py_dense_forward, METH_VARARGS, DENSE_FORWARD}, \
    {"dense_backward", py_dense_backward, METH_VARARGS, DENSE_BACKWARD}, \
    {"heads_forward", py_heads_forward, METH_VARARGS, HEADS_FORWARD}, \
    {"heads_backward", py_heads_backward, METH_VARARGS, HEADS_BACKWARD},
#else
static int has_avx512(void) { return 0; }
#define KERNELS
#endif

PyDoc_STRVAR(SUPPORTED, "Whether this processor can run the other functions.");

static PyObject *py_supported(PyObject *module, PyObject *nothing)
{
    (void)module, (void)nothing;
    return PyBool_FromLong(has_avx512());
}

static PyMethodDef functions[] = {KERNELS {"supported", py_supported, METH_NOARGS, SUPPORTED}, {NULL, NULL, 0, NULL}};
static PyModuleDef_Slot slots[] = {{0, NULL}};
static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT, .m_name = "_layers", .m_methods = functions, .m_slots = slots};

PyMODINIT_FUNC PyInit__layers(void) { return PyModuleDef_Init(&definition); }
