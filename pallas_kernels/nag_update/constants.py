"""The two constants of the NAG update, the same in every implementation.

EPS_UPDATE is added to mean(u_perp^2) before its square root. An update of RMS 1e-5 still gets 99.5% of its
turn, and the largest possible gain of the normalisation is 1e6, so gradients at u_perp = 0 are finite in
float32 and bfloat16.

EPS_NORM is added to mean(y^2) of the turned direction. Of a unit direction it changes nothing (mean(y^2) >=
1); a row of zeros, such as padding, stays zero with gradients below 1e6 times the incoming one.
"""

EPS_UPDATE = 1e-12
EPS_NORM = 1e-12
