/* One LSTM layer over whole sequences, forward and backward, with exact resets. Products as in _tiles.h.

       forward     per step, per 16 units: gates = bias + x W_ih' + h W_hh', then cell and output
       backward    per step, last one first: slopes of the gates, then slopes of x and of the entering h;
                   every CHUNK_STEPS steps the slopes of the weights, from slopes of gates that are still cached

   Where flags say so, the state that enters a step is zero, and nothing goes back to the steps before it.

   Axis letters: T steps, n rows, D inputs, H hidden, P panels of gates (each 16 units' i and f, or their g and o).
   Arrays are float32, C order: x [T, n, D], flags [T, n], out [T, n, H], weights and biases as torch.nn.LSTM has them,
   gates [T, P, n, 32], entering [2, T + 1, n, H] (h, then c; step 0 is given, the others are written). */

enum { CHUNK_STEPS = 16 };
typedef struct { Py_ssize_t steps, rows, inputs, hidden; } Sizes;

static Py_ssize_t gate_panels(const Sizes *s) { return 4 * s->hidden / WIDTH; }
static Order gate_order(const Sizes *s) { return (Order){4 * s->hidden, s->hidden}; }

/* Weights [P][D + H][32] and the sum of both biases [P][32]. */
static void lstm_lay_out(const Sizes *s, const float *w_ih, const float *w_hh, const float *b_ih, const float *b_hh,
                         float *weights, float *bias)
{
    const Py_ssize_t panel_size = (s->inputs + s->hidden) * WIDTH;
    lay_out_forward(gate_order(s), w_ih, s->inputs, weights, panel_size);
    lay_out_forward(gate_order(s), w_hh, s->hidden, weights + s->inputs * WIDTH, panel_size);
    for (Py_ssize_t panel = 0; panel < gate_panels(s); panel++)
        for (Py_ssize_t column = 0; column < WIDTH; column++) {
            Py_ssize_t row = weight_row(gate_order(s), panel, column);
            *bias++ = b_ih[row] + b_hh[row];
        }
}

/* A tile of rows through one step. gates: their place in the step's, with n rows a panel. */
INLINE void step_forward(const int rows, const Sizes *s, const float *x, const float *h, const float *c,
                         const float *weights, const float *bias, float *gates, float *out, float *next_c)
{
    const Py_ssize_t inputs = s->inputs, hidden = s->hidden, panel_size = (inputs + hidden) * WIDTH;
    for (Py_ssize_t unit = 0; unit < hidden; unit += LANES) {
        Tile tile;
        float *input_forget = gates, *cell_output = gates + s->rows * WIDTH;
        for (float *to = gates; to <= cell_output; to += s->rows * WIDTH, bias += WIDTH, weights += panel_size) {
            EACH(r, rows) {
                tile[r][0] = _mm512_loadu_ps(bias);
                tile[r][1] = _mm512_loadu_ps(bias + LANES);
            }
            multiply(rows, tile, x, inputs, 1, inputs, weights);
            multiply(rows, tile, h, hidden, 1, hidden, weights + inputs * WIDTH);
            store(rows, tile, to);
        }
        EACH(r, rows) {
            __m512 i = sigmoid(_mm512_loadu_ps(input_forget + r * WIDTH));
            __m512 f = sigmoid(_mm512_loadu_ps(input_forget + r * WIDTH + LANES));
            __m512 g = hyperbolic_tangent(_mm512_loadu_ps(cell_output + r * WIDTH));
            __m512 o = sigmoid(_mm512_loadu_ps(cell_output + r * WIDTH + LANES));
            __m512 cell = _mm512_fmadd_ps(f, _mm512_loadu_ps(c + r * hidden + unit), _mm512_mul_ps(i, g));
            _mm512_storeu_ps(next_c + r * hidden + unit, cell);
            _mm512_storeu_ps(out + r * hidden + unit, _mm512_mul_ps(o, hyperbolic_tangent(cell)));
            _mm512_storeu_ps(input_forget + r * WIDTH, i);
            _mm512_storeu_ps(input_forget + r * WIDTH + LANES, f);
            _mm512_storeu_ps(cell_output + r * WIDTH, g);
            _mm512_storeu_ps(cell_output + r * WIDTH + LANES, o);
        }
        gates += 2 * s->rows * WIDTH;
    }
}

/* gate_step: 0 if the gates of only one step are kept. */
AVX512 static void lstm_forward(const Sizes *s, const float *x, const float *flags, const float *weights,
                                const float *bias, float *gates, Py_ssize_t gate_step, float *entering, float *out)
{
    const Py_ssize_t n = s->rows, state = n * s->hidden;
    float *h = entering, *c = entering + (s->steps + 1) * state;
    for (Py_ssize_t t = 0; t < s->steps; t++, gates += gate_step, h += state, c += state) {
        for (Py_ssize_t r = 0; r < n; r++)
            if (*flags++ != 0.0f) {
                memset(h + r * s->hidden, 0, s->hidden * sizeof *h);
                memset(c + r * s->hidden, 0, s->hidden * sizeof *c);
            }
        for (Py_ssize_t first = 0; first < n; first += TILE) {
            const Py_ssize_t at = first * s->hidden;
#define STEP(ROWS) \
    step_forward(ROWS, s, x + first * s->inputs, h + at, c + at, weights, bias, gates + first * WIDTH, out + at, \
                 c + state + at)
            FOR_ROWS(tile_rows(n - first), STEP)
#undef STEP
        }
        memcpy(h + state, out, state * sizeof *h);
        out += state;
        x += n * s->inputs;
    }
}

/* Slopes of a tile's gates at one step, from those of its outputs and of the state that leaves the step.
   by_h and by_c: slopes of the leaving state; by_c becomes that of the entering one. slopes: [P][slope_rows][32]. */
INLINE void gate_slopes(const int rows, const Sizes *s, const float *gates, const float *c, const float *flags,
                        const float *by_out, const float *by_h, float *by_c, float *slopes, Py_ssize_t slope_rows)
{
    const __m512 one = _mm512_set1_ps(1.0f);
    for (Py_ssize_t unit = 0; unit < s->hidden; unit += LANES) {
        const float *cell_output = gates + s->rows * WIDTH;
        float *by_cell_output = slopes + slope_rows * WIDTH;
        for (int r = 0; r < rows; r++) {
            const Py_ssize_t at = r * s->hidden + unit;
            __m512 i = _mm512_loadu_ps(gates + r * WIDTH), f = _mm512_loadu_ps(gates + r * WIDTH + LANES);
            __m512 g = _mm512_loadu_ps(cell_output + r * WIDTH), o = _mm512_loadu_ps(cell_output + r * WIDTH + LANES);
            __m512 before = _mm512_loadu_ps(c + at);
            __m512 squashed = hyperbolic_tangent(_mm512_fmadd_ps(f, before, _mm512_mul_ps(i, g)));
            __m512 leaving = _mm512_add_ps(_mm512_loadu_ps(by_out + at), _mm512_loadu_ps(by_h + at));
            __m512 through = _mm512_mul_ps(leaving, o);
            __m512 by_cell = _mm512_fmadd_ps(through, _mm512_fnmadd_ps(squashed, squashed, one),
                                             _mm512_loadu_ps(by_c + at));
            __m512 by_i = _mm512_mul_ps(_mm512_mul_ps(by_cell, g), _mm512_mul_ps(i, _mm512_sub_ps(one, i)));
            __m512 by_f = _mm512_mul_ps(_mm512_mul_ps(by_cell, before), _mm512_mul_ps(f, _mm512_sub_ps(one, f)));
            __m512 by_g = _mm512_mul_ps(_mm512_mul_ps(by_cell, i), _mm512_fnmadd_ps(g, g, one));
            __m512 by_o = _mm512_mul_ps(_mm512_mul_ps(through, squashed), _mm512_sub_ps(one, o));
            _mm512_storeu_ps(slopes + r * WIDTH, by_i);
            _mm512_storeu_ps(slopes + r * WIDTH + LANES, by_f);
            _mm512_storeu_ps(by_cell_output + r * WIDTH, by_g);
            _mm512_storeu_ps(by_cell_output + r * WIDTH + LANES, by_o);
            _mm512_storeu_ps(by_c + at, flags[r] != 0.0f ? _mm512_setzero_ps() : _mm512_mul_ps(by_cell, f));
        }
        gates += 2 * s->rows * WIDTH;
        slopes += 2 * slope_rows * WIDTH;
    }
}

/* What the way back works on. */
enum { INPUT_WEIGHTS, HIDDEN_WEIGHTS, BY_WEIGHTS, BY_BIAS, SLOPES, LSTM_SCRATCH };

static void lstm_scratch(const Sizes *s, Py_ssize_t *floats)
{
    const Py_ssize_t gates = 4 * s->hidden;
    floats[INPUT_WEIGHTS] = gates * panels_of(s->inputs) * WIDTH;
    floats[HIDDEN_WEIGHTS] = gates * panels_of(s->hidden) * WIDTH;
    floats[BY_WEIGHTS] = gates * (s->inputs + s->hidden);
    floats[BY_BIAS] = gates;
    floats[SLOPES] = gates * CHUNK_STEPS * s->rows;
}

/* by_h, by_c: slopes of the state that enters the first step. scratch: weights laid out; slopes of weights and biases are
   left there. */
AVX512 static void lstm_backward(const Sizes *s, const float *x, const float *flags, const float *gates,
                                 const float *entering, const float *by_out, float *const *scratch, float *by_x,
                                 float *by_h, float *by_c)
{
    const Py_ssize_t n = s->rows, hidden = s->hidden, inputs = s->inputs, state = n * hidden;
    const Py_ssize_t gate_step = 4 * state, slope_rows = CHUNK_STEPS * n;
    const float *h = entering, *c = entering + (s->steps + 1) * state;
    memset(scratch[BY_WEIGHTS], 0, 4 * hidden * (inputs + hidden) * sizeof(float));
    memset(scratch[BY_BIAS], 0, 4 * hidden * sizeof(float));
    memset(by_h, 0, state * sizeof(float));
    memset(by_c, 0, state * sizeof(float));
    for (Py_ssize_t end = s->steps, begin; end > 0; end = begin) {
        begin = end > CHUNK_STEPS ? end - CHUNK_STEPS : 0;
        for (Py_ssize_t t = end - 1; t >= begin; t--)
            for (Py_ssize_t first = 0; first < n; first += TILE) {
                const Py_ssize_t row = t * n + first, at = first * hidden;
                float *slopes = scratch[SLOPES] + (row - begin * n) * WIDTH;
#define STEP(ROWS) \
    gate_slopes(ROWS, s, gates + t * gate_step + first * WIDTH, c + row * hidden, flags + row, by_out + row * hidden, \
                by_h + at, by_c + at, slopes, slope_rows); \
    input_slopes(ROWS, gate_panels(s), slopes, slope_rows, scratch[INPUT_WEIGHTS], NULL, by_x + row * inputs, inputs); \
    input_slopes(ROWS, gate_panels(s), slopes, slope_rows, scratch[HIDDEN_WEIGHTS], flags + row, by_h + at, hidden)
                FOR_ROWS(tile_rows(n - first), STEP)
#undef STEP
            }
        const Py_ssize_t count = (end - begin) * n;
        for (Py_ssize_t panel = 0; panel < gate_panels(s); panel++) {
            const float *slopes = scratch[SLOPES] + panel * slope_rows * WIDTH;
            float *by_weights = scratch[BY_WEIGHTS] + panel * (inputs + hidden) * WIDTH;
            weight_slopes(x + begin * n * inputs, inputs, count, slopes, by_weights);
            weight_slopes(h + begin * state, hidden, count, slopes, by_weights + inputs * WIDTH);
            bias_slopes(count, slopes, scratch[BY_BIAS] + panel * WIDTH);
        }
    }
}
